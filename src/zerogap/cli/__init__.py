"""The command line: one small file per command; it parses, calls and prints. No logic of a run lives here."""

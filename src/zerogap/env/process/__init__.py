"""The process that environments run in (program.py) and what it shares with the run (see zerogap.env.process_host)."""

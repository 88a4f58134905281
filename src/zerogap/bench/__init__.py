"""The same work on ours and on a peer, by turns, each side in a process of its own: `zerogap bench`."""

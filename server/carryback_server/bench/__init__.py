"""`carryback bench`: load of many turns on a running service, and what it took with reuse and without."""

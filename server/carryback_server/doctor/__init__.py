"""`carryback doctor`: does everything fit together, and if not, what is to be changed."""

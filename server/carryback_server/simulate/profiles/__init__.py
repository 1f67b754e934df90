"""Engines whose numbers come with carryback, one a file."""

"""Profiles: taken, served, and read."""

"""Generating responses with the current policy."""

"""Checks of rules against a model."""

"""Converters from the configurations of other programs to turnlane's YAML."""

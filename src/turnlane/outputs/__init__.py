"""Outputs: the passive ends of lanes. One file each."""

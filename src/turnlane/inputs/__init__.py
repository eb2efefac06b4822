"""Inputs: the ways in which events reach a node's queues. One file each."""

"""The description of a pipeline: settings, test cases and drawings. Nothing here runs it."""

"""The pipeline as it is described: actions, their order, their lanes. What runs it is Spark's."""

"""Networks: architectures by name, families for heterogeneous clients, and generators."""

"""Networks by name, families of them for heterogeneous clients, generators."""

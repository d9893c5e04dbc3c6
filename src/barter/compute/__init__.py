"""How a step runs: lanes and graphs, precision, threads, kernels. Of parties nothing is known here."""

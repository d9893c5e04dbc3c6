"""HTML reports of a run or a comparison, and sheets of synthetic images."""

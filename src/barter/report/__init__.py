"""HTML reports of a run or a comparison, and sheets of the images that a method made."""

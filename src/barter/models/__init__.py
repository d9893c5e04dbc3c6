"""Networks: the zoo, who gets which, and the generators."""

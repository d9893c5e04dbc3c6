"""All that runs on Flower: the server's side, the sites, and what keeps both alive."""

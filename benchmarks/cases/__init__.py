"""What is compared: `cells` (one layout, sharding and number of ranks each), and `layouts`, the files that are read."""

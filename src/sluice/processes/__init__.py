"""One node on several processes: the supervisor, its entries, and the directory of the cells."""

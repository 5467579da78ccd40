"""Data for training examples of other repositories, under the names of the libraries that load theirs."""

"""Problems, a file each: data, network, loss, metric, and the settings of a run."""

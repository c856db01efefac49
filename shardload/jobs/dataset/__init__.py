"""One call: files of a climate model as a Dataset of xarray."""

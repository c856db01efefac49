"""What must be imported before the tests are."""

import hdf5plugin  # noqa: F401  # before netCDF4, whose HDF5 would register filters of its own in the place of these

"""Tensor kernels: record formats, copies, attention. They import none of the other packages."""

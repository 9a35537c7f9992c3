"""The host's own kernels, in C++; `build.library` makes and loads them, `binding` calls them with tensors."""

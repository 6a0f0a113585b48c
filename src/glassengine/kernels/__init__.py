"""Functions judged beside functions: kernels without a model, an export or a tolerance."""

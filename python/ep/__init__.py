"""MoE expert parallelism: dispatch tokens to the ranks of their experts, combine the results."""

from importlib.metadata import version as _version

__version__ = _version("ep-moe")
__all__ = ["__version__"]

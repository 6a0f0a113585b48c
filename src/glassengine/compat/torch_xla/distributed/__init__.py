"""`torch_xla.distributed`: `parallel_loader`, imported as `pl`, and `xla_multiprocessing`, imported as `xmp`.

Importing it lets `torch.distributed` refuse the process group "xla" with a reason.
"""

from glassengine.compat.torch_xla.distributed import parallel_loader as parallel_loader
from glassengine.compat.torch_xla.distributed import xla_backend as xla_backend
from glassengine.compat.torch_xla.distributed import xla_multiprocessing as xla_multiprocessing

"""`torch_xla.amp.syncfree`: optimizers that read no value from the device, which those of torch do not either here."""

from torch.optim import SGD as SGD
from torch.optim import Adam as Adam
from torch.optim import AdamW as AdamW

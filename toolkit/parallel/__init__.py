"""From one device to many: simulated devices and meshes.

* `simulate_devices`: the CPU shows itself as many devices
* `make_mesh`: a grid of devices with named axes, its axis type said
"""

from toolkit.parallel.devices import simulate_devices
from toolkit.parallel.mesh import make_mesh

__all__ = ["make_mesh", "simulate_devices"]

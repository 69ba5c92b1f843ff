"""The search for a plan, the simulator behind it, and the measurements that correct both."""

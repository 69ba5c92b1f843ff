"""SGLang as the engine: a server process of its own on the device of this one."""

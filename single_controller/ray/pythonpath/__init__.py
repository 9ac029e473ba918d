"""A folder for PYTHONPATH: in it, ``import dispatch``, ``single_controller`` and ``workers`` find this library, but not
what else is installed beside it. See `single_controller.ray.python_env`."""

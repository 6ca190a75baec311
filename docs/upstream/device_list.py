# SPDX-License-Identifier: Apache-2.0
"""Two threads that are the first to compile end the process.

python device_list.py   # WRONG: process 3 of 30 died of signal 11

jaxlib makes the class of a device list's iterator when a list is first iterated. Another thread
that iterates one meanwhile finds a class that is not there yet. Needs jax 0.11.2 and no GPU.
"""

import io
import subprocess
import sys
import threading

PROCESSES, THREADS = 30, 8


def compile_in_threads() -> None:
    import jax
    from jaxlib import xla_client

    sys.setswitchinterval(1e-6)  # makes it likely; without it one process of some thirty dies
    jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), "float32"))
    program = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(program)
    ready = threading.Barrier(THREADS)

    def compile_one() -> None:
        ready.wait()
        device.client.compile_and_load(
            program.getvalue(),
            executable_devices=xla_client.DeviceList((device,)),
            compile_options=xla_client.CompileOptions(),
        )

    threads = [threading.Thread(target=compile_one) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[1:] == ["once"]:
        compile_in_threads()
        sys.exit()
    for number in range(1, PROCESSES + 1):
        code = subprocess.run([sys.executable, __file__, "once"], check=False).returncode
        if code:
            print(f"WRONG: process {number} of {PROCESSES} died of signal {-code}")
            sys.exit(1)
    print("right")

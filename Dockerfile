# The server on a Hopper GPU.
#
#   docker build -t detjax .
#   docker run --gpus all -p 8000:8000 -v detjax-state:/state detjax --model meta-llama/Llama-3.1-8B-Instruct
#
# Written where no container engine ran: this file has not been built there.
# The image has what the driver needs. XLA, ptxas and cuBLAS come with jax's wheels for CUDA 13.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY detjax detjax
RUN python3 -m venv /opt/detjax \
    && /opt/detjax/bin/pip install --no-cache-dir ".[cuda13,serve,receipts,structured]"

# Models, compiled programs and the key that they are trusted by. Keep this volume between runs:
# without it each start compiles everything anew.
ENV HF_HOME=/state/huggingface XDG_CACHE_HOME=/state/cache XDG_STATE_HOME=/state/state
RUN useradd --create-home --uid 10001 detjax && install -d -o detjax -m 0700 /state
USER detjax
WORKDIR /home/detjax
VOLUME /state

EXPOSE 8000
ENTRYPOINT ["/opt/detjax/bin/python", "-m", "detjax.serve", "--host", "0.0.0.0"]

# hone for hosts with NVIDIA GPUs, whose driver is 580 or newer:
#   docker build --tag hone:0.1.0 .
#   docker run --rm --gpus all --shm-size 16g --volume "$PWD/runs:/work/runs" hone:0.1.0 hone quickstart
# torch brings the libraries of CUDA, so that the base has none of them (docs/launching.md).
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton compiles with gcc and Python's headers; tini passes signals on to hone.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 hone \
    && install --directory --owner hone /opt/hone /src /work /work/runs
USER hone
ENV PATH=/opt/hone/bin:$PATH
RUN python3 -m venv /opt/hone

# torch and what it brings are gigabytes, and stay where only hone has changed.
COPY --chown=hone constraints.txt /src/
RUN pip install --no-cache-dir --constraint /src/constraints.txt torch transformers

COPY --chown=hone LICENSE README.md pyproject.toml /src/
COPY --chown=hone src /src/src
RUN pip install --no-cache-dir --constraint /src/constraints.txt '/src[data,flash,hybrid,images,ray,serve]'

WORKDIR /work
ENTRYPOINT ["tini", "--"]
CMD ["hone", "doctor"]

# automoe on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t automoe:cuda .
# torch's wheels bring CUDA and NCCL; the host needs the driver and the container toolkit.
# docker run --gpus all --shm-size=16g: NCCL needs more shared memory than containers have.
FROM python:3.12-slim

# Triton compiles its launchers with gcc.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:* g++=4:* libc6-dev=2.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer

COPY . /build/automoe
RUN pip install --no-cache-dir "/build/automoe[gpu,nf4,eval,tensorboard]" \
    && rm -rf /build

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["automoe"]
CMD ["doctor"]

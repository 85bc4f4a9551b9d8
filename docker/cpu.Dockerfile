# automoe without a GPU: docker build -f docker/cpu.Dockerfile -t automoe:cpu .
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++=4:* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer

COPY constraints-cpu.txt docker/cpu_torch.py /build/
RUN PIP_NO_CACHE_DIR=1 python /build/cpu_torch.py /build/constraints-cpu.txt
COPY . /build/automoe
RUN pip install --no-cache-dir --constraint /build/constraints-cpu.txt /build/automoe \
    && rm -rf /build

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["automoe"]
CMD ["--help"]

# The server.  CPU:  docker build -t ldm_lite .
#              CUDA: docker build -t ldm_lite:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu128 .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

WORKDIR /app
RUN pip install --index-url "${TORCH}" "torch>=2.6"
COPY pyproject.toml README.md LICENSE ./
COPY weights weights
COPY ldm_lite ldm_lite
RUN pip install ".[${EXTRAS}]" && useradd --create-home server && rm -rf /app/*

USER server
WORKDIR /home/server
EXPOSE 7860
HEALTHCHECK --start-period=2m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:7860/healthz')"]
# SIGTERM finishes what runs: give it more time than --grace, docker stop -t 60.
ENTRYPOINT ["python", "-m", "ldm_lite.serve", "--host", "0.0.0.0"]

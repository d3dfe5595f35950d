# The server.  CPU:  docker build -t ldm_lite .
#              CUDA: docker build -t ldm_lite:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu128 .
# The layers go from what changes least to what changes most: torch, other packages, weights, code.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

WORKDIR /app
COPY .ci/constraints.txt ./
RUN pip install --index-url "${TORCH}" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml ./
RUN python -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*p['dependencies'], *(x for name in sys.argv[1].split(',') for x in p['optional-dependencies'][name]), sep='\n')" \
    "${EXTRAS}" > requirements.txt && pip install -c constraints.txt -r requirements.txt
COPY weights weights
COPY README.md LICENSE ./
COPY scripts/package_page.py scripts/
COPY ldm_lite ldm_lite
RUN pip install --no-deps . && useradd --create-home server && rm -rf /app/*

USER server
WORKDIR /home/server
EXPOSE 7860
HEALTHCHECK --start-period=2m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:7860/healthz')"]
# SIGTERM finishes what runs: give it more time than --grace, docker stop -t 60.
ENTRYPOINT ["python", "-m", "ldm_lite.serve", "--host", "0.0.0.0"]

# Two images from one file: `--target api` (no torch) and `--target worker` (CUDA torch).
FROM python:3.13-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 SPARD_DATA_DIR=/data
RUN useradd --create-home --uid 10001 spard && install -d -o spard -g spard -m 0700 /data /signing
WORKDIR /src
COPY requirements ./requirements
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY service ./service
COPY app ./app
COPY worker ./worker
COPY spard ./spard
COPY migrations ./migrations

FROM base AS api
RUN pip install --no-deps --require-hashes -r requirements/api.lock \
 && pip install --no-deps . ./service
USER spard
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENV UVICORN_HOST=0.0.0.0
CMD ["python", "-P", "-m", "uvicorn", "--app-dir", "/", "app.main:checked_app", "--factory", "--http", "app.http.connections:BoundedHttp", "--timeout-graceful-shutdown", "5"]

FROM base AS worker
RUN pip install --no-deps --require-hashes -r requirements/worker.lock && pip install --no-deps . ./service
USER spard
WORKDIR /data
CMD ["python", "-P", "-m", "celery", "--workdir", "/", "-A", "worker.celery_app", "worker", "--pool=solo", "-c", "1", "--without-gossip", "--without-mingle"]

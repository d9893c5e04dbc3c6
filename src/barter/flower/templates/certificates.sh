#!/bin/sh
# Create a certificate authority, and the coordinator's certificate for these host names and addresses:
#     sh certificates.sh coordinator.example.org 192.0.2.7
# If the authority exists, it is kept, so that sites need not change, and a new certificate is created.
set -eu
umask 077
[ $# -gt 0 ] || { echo "usage: sh certificates.sh NAME-OR-ADDRESS ..." >&2; exit 2; }
mkdir -p certificates
cd certificates
sans=""
for name in "$@"; do
    case "$name" in
        *:*) sans="${sans:+$sans,}IP:$name" ;;
        *[!0-9.]*) sans="${sans:+$sans,}DNS:$name" ;;
        *) sans="${sans:+$sans,}IP:$name" ;;
    esac
done
if [ ! -f ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 3650 -subj "/CN=barter" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout ca.key -out ca.crt
fi
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj "/CN=$1" -keyout server.key -out server.csr
printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$sans" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -extfile server.ext -out server.pem
rm server.csr server.ext

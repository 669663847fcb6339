#!/usr/bin/env bash
# A real S3 server on loopback: Ceph's radosgw over an in-memory OSD. Up in about 12 s, about 1.1 GB resident.
#   apt-get install -y radosgw ceph-osd ceph-mon ceph-mgr ceph-common
#   radosgw.sh start DIR [PORT]   prints endpoint, key and secret      radosgw.sh stop DIR
set -euo pipefail
cmd=$1 dir=$(mkdir -p "$2" && cd "$2" && pwd) port=${3:-19003} mon=$((${3:-19003} - 1))
export CEPH_CONF=$dir/ceph.conf
case $cmd in
stop)
  for p in "$dir"/run/*.pid; do [ -e "$p" ] && kill "$(cat "$p")" 2>/dev/null || true; done; exit 0 ;;
start) ;;
*) echo "usage: radosgw.sh start|stop DIR [PORT]" >&2; exit 2 ;;
esac
rm -rf "${dir:?}"/{mon,mgr,osd,run,rgw,keyring,monmap}; mkdir -p "$dir"/{mon,mgr/a,osd/0,run,rgw}
fsid=$(cat /proc/sys/kernel/random/uuid) osd=$(cat /proc/sys/kernel/random/uuid)
cat > "$CEPH_CONF" <<C
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$mon]
mon initial members = a
keyring = $dir/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
run dir = $dir/run
log file = $dir/run/\$name.log
admin socket = $dir/run/\$name.asok
pid file = $dir/run/\$name.pid
ms bind ipv6 = false
public addr = 127.0.0.1
auth allow insecure global id reclaim = false
[mon.a]
mon data = $dir/mon/a
[osd.0]
osd data = $dir/osd/0
osd objectstore = memstore
memstore device bytes = ${MEMSTORE_BYTES:-4294967296}
[mgr.a]
mgr data = $dir/mgr/a
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:$port
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 20
C
key() { ceph-authtool "$dir/keyring" --gen-key -n "$@" >/dev/null; }
ceph-authtool -C "$dir/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null   # without cephx keys radosgw hangs
for who in client.admin client.rgw.a osd.0; do key "$who" --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'; done
key mgr.a --cap mon 'allow *' --cap osd 'allow *' --cap mds 'allow *'
monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon]" "$dir/monmap" >/dev/null
ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"; ceph-mon -i a
timeout 20 ceph osd new "$osd" >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$osd" 2>/dev/null; ceph-osd -i 0 2>/dev/null
ceph-mgr -i a
setsid radosgw -f -n client.rgw.a --rgw-data="$dir/rgw" >"$dir/run/rgw.out" 2>&1 & echo $! >"$dir/run/rgw.pid"
for _ in $(seq 600); do (echo >"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break; sleep 0.1; done
timeout 60 radosgw-admin -n client.rgw.a user create --uid=u --display-name=u --access-key=AKIAKEY1 --secret-key=SECRETKEY1 >/dev/null 2>"$dir/run/user.err"
echo "endpoint=http://127.0.0.1:$port access_key=AKIAKEY1 secret_key=SECRETKEY1"

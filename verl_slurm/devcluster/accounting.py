"""The accounting of the embedded cluster, as text and command lines: a database, slurmdbd, and what is in them.

MariaDB listens on a socket in the cluster's directory and on no port. slurmdbd has a password for it, made at each
start, which is in slurmdbd.conf and, until the database has read it, in a file of SQL; both have mode 0600. Slurm's
programs prove to slurmdbd who they are by munge. With the cluster's state the database is lost at the next start.

In it are: the cluster, the account `dev`, this user (and root), and two QOS. `normal` is Slurm's own and the default;
`urgent` preempts it. Jobs of `normal` get the cluster's grace time and preemption mode.
"""

from pathlib import Path

from verl_slurm.devcluster.conf import URGENT, ClusterLayout, ClusterOptions

_ACCOUNT = "dev"
_DATABASE = "slurm_acct_db"
_DATABASE_USER = "slurm"


def mariadbd_socket(directory: Path) -> Path:
    """Returns the database's socket. libmariadb finds it by MYSQL_UNIX_PORT; slurmdbd.conf has no key for it."""
    return directory / "database" / "socket"


def slurmdbd_conf(layout: ClusterLayout, password: str) -> str:
    """Returns the text of slurmdbd.conf. slurmdbd wants it with mode 0600."""
    base = layout.directory
    lines = [
        "# Written by `verl-slurm devcluster start`; lost at the next start.",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "DbdHost=localhost",
        f"DbdPort={layout.ports[-1]}",
        # loopback alone
        "CommunicationParameters=NoInAddrAny",
        f"SlurmUser={layout.user}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        f"StorageUser={_DATABASE_USER}",
        f"StoragePass={password}",
        f"StorageLoc={_DATABASE}",
        f"LogFile={base}/log/slurmdbd.log",
        f"PidFile={base}/run/slurmdbd.pid",
    ]
    return "\n".join(lines) + "\n"


def install_database(program: str, layout: ClusterLayout) -> list[str]:
    """Returns the command line that makes an empty database. Its own root is this user, by the socket alone."""
    return [
        program,
        # Not the machine's own configuration, which has other directories.
        "--no-defaults",
        f"--datadir={layout.directory / 'database' / 'data'}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={layout.user}",
        "--skip-test-db",
    ]


def database_sql(password: str) -> str:
    """Returns the SQL that gives slurmdbd its database. `password` must need no quoting."""
    return (
        f"CREATE DATABASE {_DATABASE};\n"
        f"CREATE USER {_DATABASE_USER}@localhost IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {_DATABASE}.* TO {_DATABASE_USER}@localhost;\n"
    )


def mariadbd_argv(program: str, layout: ClusterLayout, sql: Path) -> list[str]:
    """Returns the command line of the database's server, which stays in the foreground."""
    base = layout.directory
    return [
        program,
        "--no-defaults",
        # As root it starts only if it is told so; else this changes nothing.
        f"--user={layout.user}",
        f"--datadir={base / 'database' / 'data'}",
        f"--socket={mariadbd_socket(base)}",
        "--skip-networking",
        f"--pid-file={base / 'run' / 'mariadbd.pid'}",
        f"--log-error={base / 'log' / 'mariadbd.log'}",
        f"--init-file={sql}",
        # Not durable: nothing of it outlives the cluster.
        "--innodb-flush-log-at-trx-commit=0",
        "--performance-schema=OFF",
        # With less of these three slurmdbd logs an error.
        "--innodb-buffer-pool-size=128M",
        "--innodb-log-file-size=64M",
        "--innodb-lock-wait-timeout=900",
    ]


def sacctmgr_commands(program: str, options: ClusterOptions, layout: ClusterLayout) -> list[list[str]]:
    # In the spelling of `sacctmgr`. GANG belongs to the cluster's mode alone.
    mode = options.preempt_mode.lower()
    allowed = [f"DefaultAccount={_ACCOUNT}", f"QOS=normal,{URGENT}", "DefaultQOS=normal"]
    words = [
        ["add", "cluster", layout.name],
        ["modify", "qos", "normal", "set", f"GraceTime={options.grace_s}", f"PreemptMode={mode}"],
        ["add", "qos", URGENT, "Priority=1000", "Preempt=normal"],
        ["add", "account", _ACCOUNT],
        *(["add", "user", user, *allowed] for user in dict.fromkeys((layout.user, "root"))),
    ]
    return [[program, "--immediate", *each] for each in words]

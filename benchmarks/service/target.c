/* The target of the benchmarks: HTTP/1.1 with keep-alive, one thread, epoll.
 *
 *   POST /t/ID     503 for the first attempt of every fifth id, else 200
 *   POST /ok/ID    200
 *   POST /busy     503
 *   POST /reset    clear the counters and the log
 *   GET  /stats    {"requests", "done", "duplicates", "bad", "last_done"}; "last_done" is in
 *                  seconds of the monotonic clock
 *   GET  /log      a line "ID ARRIVED GAP" for each id: the arrival of its first attempt (epoch ms),
 *                  and the time from its 503 to the next attempt (ms, -1 without a 503)
 *
 * Listens on a free port of all addresses of the loopback network and prints the port. Exits when
 * its standard input is closed, so that it does not outlive the process that started it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MAX_IDS = 1 << 21, MAX_DESCRIPTORS = 1 << 16, MAX_EVENTS = 256 };
enum { BUFFER_BYTES = 1 << 16, LINE_BYTES = 64 };

static struct task {
    unsigned attempts;
    bool done;
    double arrived_at; /* epoch seconds */
    double failed_at;  /* monotonic seconds */
    double gap;        /* seconds */
} *tasks;
static struct connection {
    char *data;
    size_t length;
} connections[MAX_DESCRIPTORS];
static long requests, done, duplicates, bad, max_id = -1;
static double last_done;

static const char OK[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
static const char BUSY[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy";

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *message) { perror(message), exit(1); }

static void send_all(int fd, const char *text, size_t length) {
    while (length > 0) {
        ssize_t written = write(fd, text, length);
        if (written < 0 && errno != EAGAIN)
            return; /* the client has closed the connection; the next read closes it here */
        written = written < 0 ? 0 : written; /* the socket buffer is full: try again */
        text += written;
        length -= (size_t)written;
    }
}

static void send_page(int fd, const char *text, size_t length) {
    char head[LINE_BYTES];
    int size = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", length);
    send_all(fd, head, (size_t)size);
    send_all(fd, text, length);
}

static void send_stats(int fd) {
    static const char format[] = "{\"requests\": %ld, \"done\": %ld, \"duplicates\": %ld, "
                                 "\"bad\": %ld, \"last_done\": %.6f}";
    char page[4 * LINE_BYTES];
    int size = snprintf(page, sizeof page, format, requests, done, duplicates, bad, last_done);
    send_page(fd, page, (size_t)size);
}

static void send_log(int fd) {
    char *page = malloc((size_t)(max_id + 2) * LINE_BYTES);
    size_t length = 0;
    if (page == NULL)
        fail("malloc");
    for (long id = 0; id <= max_id; id++)
        if (tasks[id].attempts > 0)
            length += (size_t)snprintf(page + length, LINE_BYTES, "%ld %.3f %.3f\n", id,
                                       tasks[id].arrived_at * 1e3,
                                       tasks[id].gap > 0 ? tasks[id].gap * 1e3 : -1.0);
    send_page(fd, page, length);
    free(page);
}

static void reset(void) {
    memset(tasks, 0, (size_t)(max_id + 1) * sizeof *tasks);
    requests = done = duplicates = bad = 0;
    max_id = -1;
    last_done = 0;
}

static void handle_bad_request(int fd) {
    bad++;
    send_all(fd, OK, sizeof OK - 1);
}

static void handle_task(int fd, const char *text, bool may_fail) {
    char *end;
    long id = strtol(text, &end, 10);
    requests++;
    if (end == text || id < 0 || id >= MAX_IDS) {
        handle_bad_request(fd);
        return;
    }
    struct task *task = &tasks[id];
    double now = seconds(CLOCK_MONOTONIC);
    if (id > max_id)
        max_id = id;
    if (++task->attempts == 1)
        task->arrived_at = seconds(CLOCK_REALTIME);
    if (may_fail && id % 5 == 0 && task->attempts == 1) {
        task->failed_at = now;
        send_all(fd, BUSY, sizeof BUSY - 1);
        return;
    }
    if (task->failed_at > 0 && task->gap == 0)
        task->gap = now - task->failed_at;
    send_all(fd, OK, sizeof OK - 1);
    if (task->done) {
        duplicates++;
        return;
    }
    task->done = true;
    done++;
    last_done = now;
}

static void handle_request(int fd, const char *head) {
    const char *path = strchr(head, ' ');
    path = path == NULL ? "" : path + 1;
    if (strncmp(path, "/t/", 3) == 0) {
        handle_task(fd, path + 3, true);
    } else if (strncmp(path, "/ok/", 4) == 0) {
        handle_task(fd, path + 4, false);
    } else if (strncmp(path, "/busy", 5) == 0) {
        send_all(fd, BUSY, sizeof BUSY - 1);
    } else if (strncmp(path, "/stats", 6) == 0) {
        send_stats(fd);
    } else if (strncmp(path, "/log", 4) == 0) {
        send_log(fd);
    } else if (strncmp(path, "/reset", 6) == 0) {
        reset();
        send_all(fd, OK, sizeof OK - 1);
    } else {
        handle_bad_request(fd);
    }
}

/* Return the Content-Length of a request, or -1 for Transfer-Encoding, which is not supported. */
static long body_length(char *head) {
    long length = 0;
    for (char *line = strchr(head, '\n'); line != NULL; line = strchr(line + 1, '\n')) {
        if (strncasecmp(line + 1, "content-length:", 15) == 0)
            length = atol(line + 16);
        else if (strncasecmp(line + 1, "transfer-encoding:", 18) == 0)
            return -1;
    }
    return length;
}

/* Handle all complete requests. Return false if the connection must be closed. */
static bool handle_requests(int fd) {
    struct connection *connection = &connections[fd];
    size_t begin = 0;
    while (begin < connection->length) {
        char *head = connection->data + begin;
        char *end = memmem(head, connection->length - begin, "\r\n\r\n", 4);
        if (end == NULL)
            break;
        *end = '\0';
        long body = body_length(head);
        size_t size = (size_t)(end - head) + 4 + (size_t)(body > 0 ? body : 0);
        if (body < 0 || size > BUFFER_BYTES) {
            bad++;
            return false;
        }
        *end = '\r';
        if (size > connection->length - begin)
            break; /* the body is incomplete: the head is parsed again after the next read */
        handle_request(fd, head);
        begin += size;
    }
    connection->length -= begin;
    memmove(connection->data, connection->data + begin, connection->length);
    return connection->length < BUFFER_BYTES;
}

static void add_to_epoll(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

static void accept_all(int listener, int epoll) {
    int fd, yes = 1;
    struct sockaddr_in client;
    socklen_t size = sizeof client;
    while ((fd = accept4(listener, (struct sockaddr *)&client, &size, SOCK_NONBLOCK)) >= 0) {
        if (ntohl(client.sin_addr.s_addr) >> 24 != IN_LOOPBACKNET) {
            close(fd);
            continue;
        }
        if (fd >= MAX_DESCRIPTORS)
            fail("too many connections");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        if (connections[fd].data == NULL && (connections[fd].data = malloc(BUFFER_BYTES)) == NULL)
            fail("malloc");
        connections[fd].length = 0;
        add_to_epoll(epoll, fd);
    }
}

static void read_requests(int fd) {
    struct connection *connection = &connections[fd];
    ssize_t size = read(fd, connection->data + connection->length, BUFFER_BYTES - connection->length);
    connection->length += (size_t)(size > 0 ? size : 0);
    if (size == 0 || (size < 0 && errno != EAGAIN) || !handle_requests(fd))
        close(fd);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit limit; /* each connection takes a descriptor */
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), epoll = epoll_create1(0);
    if ((tasks = calloc(MAX_IDS, sizeof *tasks)) == NULL)
        fail("calloc");
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096) ||
        getsockname(listener, (struct sockaddr *)&address, &size))
        fail("listen");
    add_to_epoll(epoll, listener);
    add_to_epoll(epoll, STDIN_FILENO);
    struct epoll_event events[MAX_EVENTS];
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(epoll, events, MAX_EVENTS, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == STDIN_FILENO)
                return 0;
            if (fd == listener)
                accept_all(listener, epoll);
            else
                read_requests(fd);
        }
    }
}

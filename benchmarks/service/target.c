/* The target of the benchmarks: HTTP/1.1 with keep-alive, one thread, epoll.
 *
 *   POST /t/ID     503 to the first attempt of every fifth id, else 200
 *   POST /ok/ID    200
 *   POST /reset    forget everything
 *   GET  /stats    {"requests", "done", "duplicates", "bad", "last_done"}; seconds, monotonic clock
 *   GET  /log      a line for each id: ID ARRIVED GAP. When its first attempt came (epoch ms), and
 *                  how long after the 503 the next one came (ms, -1 without a 503)
 *
 * Takes a free port of the loopback address and prints it. Ends when its standard input does, so
 * that it does not outlive who started it.
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
#include <time.h>
#include <unistd.h>

enum { IDS = 1 << 21, DESCRIPTORS = 1 << 16, EVENTS = 256, BUFFER = 1 << 16, LINE = 64 };

static struct seen {
    unsigned attempts;
    bool done;
    double arrived; /* epoch seconds */
    double refused; /* monotonic seconds */
    double gap;     /* seconds */
} *ids;
static struct connection {
    char *data;
    size_t length;
} connections[DESCRIPTORS];
static long requests, done, duplicates, bad, highest = -1;
static double last_done;

static const char OK[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
static const char BUSY[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy";

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) { perror(what), exit(1); }

static void put(int fd, const char *text, size_t length) {
    while (length > 0) {
        ssize_t written = write(fd, text, length);
        if (written < 0 && errno != EAGAIN)
            return; /* the client has gone, which the next read will tell */
        written = written < 0 ? 0 : written; /* a long answer has filled the socket: again */
        text += written;
        length -= (size_t)written;
    }
}

static void put_page(int fd, const char *text, size_t length) {
    char head[LINE];
    int size = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", length);
    put(fd, head, (size_t)size);
    put(fd, text, length);
}

static void put_stats(int fd) {
    static const char form[] = "{\"requests\": %ld, \"done\": %ld, \"duplicates\": %ld, "
                               "\"bad\": %ld, \"last_done\": %.6f}";
    char page[4 * LINE];
    int size = snprintf(page, sizeof page, form, requests, done, duplicates, bad, last_done);
    put_page(fd, page, (size_t)size);
}

static void put_log(int fd) {
    char *page = malloc((size_t)(highest + 2) * LINE);
    size_t length = 0;
    if (page == NULL)
        fail("malloc");
    for (long id = 0; id <= highest; id++)
        if (ids[id].attempts > 0)
            length += (size_t)snprintf(page + length, LINE, "%ld %.3f %.3f\n", id,
                                       ids[id].arrived * 1e3,
                                       ids[id].gap > 0 ? ids[id].gap * 1e3 : -1.0);
    put_page(fd, page, length);
    free(page);
}

static void reset(void) {
    memset(ids, 0, (size_t)(highest + 1) * sizeof *ids);
    requests = done = duplicates = bad = 0;
    highest = -1;
    last_done = 0;
}

static void misread(int fd) {
    bad++;
    put(fd, OK, sizeof OK - 1);
}

static void attempt(int fd, const char *text, bool refuses) {
    char *end;
    long id = strtol(text, &end, 10);
    requests++;
    if (end == text || id < 0 || id >= IDS) {
        misread(fd);
        return;
    }
    struct seen *it = &ids[id];
    double now = seconds(CLOCK_MONOTONIC);
    if (id > highest)
        highest = id;
    if (++it->attempts == 1)
        it->arrived = seconds(CLOCK_REALTIME);
    if (refuses && id % 5 == 0 && it->attempts == 1) {
        it->refused = now;
        put(fd, BUSY, sizeof BUSY - 1);
        return;
    }
    if (it->refused > 0 && it->gap == 0)
        it->gap = now - it->refused;
    put(fd, OK, sizeof OK - 1);
    if (it->done) {
        duplicates++;
        return;
    }
    it->done = true;
    done++;
    last_done = now;
}

static void answer(int fd, const char *head) {
    const char *path = strchr(head, ' ');
    path = path == NULL ? "" : path + 1;
    if (strncmp(path, "/t/", 3) == 0) {
        attempt(fd, path + 3, true);
    } else if (strncmp(path, "/ok/", 4) == 0) {
        attempt(fd, path + 4, false);
    } else if (strncmp(path, "/stats", 6) == 0) {
        put_stats(fd);
    } else if (strncmp(path, "/log", 4) == 0) {
        put_log(fd);
    } else if (strncmp(path, "/reset", 6) == 0) {
        reset();
        put(fd, OK, sizeof OK - 1);
    } else {
        misread(fd);
    }
}

/* Bytes of the body that a head announces; -1: in a way that is not understood here. */
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

/* Answer all requests that are complete; false: the connection is of no use any more. */
static bool serve(int fd) {
    struct connection *it = &connections[fd];
    size_t begin = 0;
    while (begin < it->length) {
        char *head = it->data + begin;
        char *end = memmem(head, it->length - begin, "\r\n\r\n", 4);
        if (end == NULL)
            break;
        *end = '\0';
        long body = body_length(head);
        size_t size = (size_t)(end - head) + 4 + (size_t)(body > 0 ? body : 0);
        if (body < 0 || size > BUFFER) {
            bad++;
            return false;
        }
        *end = '\r';
        if (size > it->length - begin)
            break; /* the rest will come: the head is read again then */
        answer(fd, head);
        begin += size;
    }
    it->length -= begin;
    memmove(it->data, it->data + begin, it->length);
    return it->length < BUFFER;
}

static void watch(int epoll, int fd) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wanted);
}

static void accept_all(int listener, int epoll) {
    int fd, yes = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= DESCRIPTORS)
            fail("too many connections");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        if (connections[fd].data == NULL && (connections[fd].data = malloc(BUFFER)) == NULL)
            fail("malloc");
        connections[fd].length = 0;
        watch(epoll, fd);
    }
}

static void receive(int fd) {
    struct connection *it = &connections[fd];
    ssize_t size = read(fd, it->data + it->length, BUFFER - it->length);
    it->length += (size_t)(size > 0 ? size : 0);
    if (size == 0 || (size < 0 && errno != EAGAIN) || !serve(fd))
        close(fd);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), epoll = epoll_create1(0);
    if ((ids = calloc(IDS, sizeof *ids)) == NULL)
        fail("calloc");
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096) ||
        getsockname(listener, (struct sockaddr *)&address, &size))
        fail("listen");
    watch(epoll, listener);
    watch(epoll, STDIN_FILENO);
    struct epoll_event events[EVENTS];
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(epoll, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == STDIN_FILENO)
                return 0;
            if (fd == listener)
                accept_all(listener, epoll);
            else
                receive(fd);
        }
    }
}

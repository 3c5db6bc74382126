"""The Lua scripts that run in Redis. Each script that writes first checks the owner's token.

The token is the value of the fence when the owner took the store. The next owner raises the fence,
so that Redis refuses the writes of a process that was paused and still believes it is the owner.
"""

from __future__ import annotations

import hashlib
from typing import Final


class Script:
    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


# A write has a stamp: the owner's token and the number of the write. If a reply is lost, the write
# is sent again while the first copy may still be in a buffer, so Redis may see it after later
# writes. A write whose stamp is not above the last one is done already, or too late, and does
# nothing.
#
# The last write rewrites its stamp when it is repeated: a connection that waits for replicas waits
# for what it has written itself, and the copy may come over a new connection.
#
# The token is above this unit, the number below; one bit tells the two halves of a frame apart.
STAMP_UNIT: Final = 1 << 33

# KEYS: fence, log, and all keys written to.
# ARGV: token, stamp, number of the frame ("" if it is no frame), then steps:
#   "A" stream rewritten count, then count times: id, record   messages
#   "D" stream rewritten id n, then n values                   a message with extra fields
#   n values                                                   a command
#   "?" n values                                               a command that may be refused
# The first command writes to the log, so that a Redis without memory refuses before any change.
_APPLY_STEPS: Final = """
local function store(stream, rewritten, id, record, ...)
  local answer = redis.pcall('XADD', stream, id, 'record', record, ...)
  if type(answer) ~= 'table' or not answer.err then return end
  if not string.find(answer.err, 'equal or smaller', 1, true) then
    redis.call('XADD', stream, id, 'record', record, ...)
  end
  if #redis.call('XRANGE', stream, id, id) == 0 then
    redis.call('HSET', rewritten, string.match(id, '^%d+'), record)
  end
end
local function steps(at)
  local last = #ARGV
  while at <= last do
    local what = ARGV[at]
    if what == 'A' then
      local stream, rewritten, count = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
      at = at + 4
      for _ = 1, count do
        store(stream, rewritten, ARGV[at], ARGV[at + 1])
        at = at + 2
      end
    elseif what == 'D' then
      local count = tonumber(ARGV[at + 4])
      store(ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], unpack(ARGV, at + 5, at + 4 + count))
      at = at + 5 + count
    elseif what == '?' then
      local count = tonumber(ARGV[at + 1])
      redis.pcall(unpack(ARGV, at + 2, at + 1 + count))
      at = at + 2 + count
    else
      local count = tonumber(what)
      redis.call(unpack(ARGV, at + 1, at + count))
      at = at + 1 + count
    end
  end
end
"""

WRITE: Final = Script(
    _APPLY_STEPS
    + """
local fence = redis.call('GET', KEYS[1])
if fence ~= ARGV[1] then return redis.error_reply('FENCED ' .. tostring(fence)) end
local log = redis.call('HMGET', KEYS[2], 'stamp', 'frame')
if tonumber(log[1] or '0') >= tonumber(ARGV[2]) then
  if tonumber(log[1]) == tonumber(ARGV[2]) then redis.call('HSET', KEYS[2], 'stamp', log[1]) end
  return 0
end
if ARGV[3] == '' then
  steps(4)
  redis.call('HSET', KEYS[2], 'stamp', ARGV[2])
else
  local last = tonumber(log[2] or '0')
  if last + 1 ~= tonumber(ARGV[3]) then return redis.error_reply('GAP ' .. last) end
  steps(4)
  redis.call('HSET', KEYS[2], 'stamp', ARGV[2], 'frame', ARGV[3])
end
return 1
"""
)

# The same for one partition of a Cluster, where the store's fence is on another node; the fence
# here is the last stamp. KEYS: fence of the partition, and all keys written to. ARGV: token, stamp,
# steps.
WRITE_PARTITION: Final = Script(
    _APPLY_STEPS
    + f"""
local fence = tonumber(redis.call('GET', KEYS[1]) or '0')
if math.floor(fence / {STAMP_UNIT}) > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED ' .. fence)
end
if fence >= tonumber(ARGV[2]) then
  if fence == tonumber(ARGV[2]) then redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL') end
  return 0
end
steps(3)
redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
return 1
"""
)

# KEYS: lease, fence. ARGV: owner, milliseconds. Returns the token, also if the reply was lost
# before; or the current owner and the rest of its lease.
ACQUIRE: Final = Script(
    """
if redis.call('GET', KEYS[1]) == ARGV[1] then return {tonumber(redis.call('GET', KEYS[2]))} end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return {redis.call('INCR', KEYS[2])}
end
return {-1, redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
"""
)

# KEYS: lease, fence. ARGV: owner, milliseconds, the owner to take the lease from ("" for any).
# Returns the token, or -1 if another process is the owner or the lease has ended.
FORCE_ACQUIRE: Final = Script(
    """
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then return {tonumber(redis.call('GET', KEYS[2]))} end
if ARGV[3] ~= '' and owner ~= ARGV[3] then return {-1} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {redis.call('INCR', KEYS[2])}
"""
)

# KEYS: lease, fence. ARGV: token, owner, milliseconds. Also renews an expired lease that no other
# broker took.
RENEW: Final = Script(
    """
local fence = redis.call('GET', KEYS[2])
if fence ~= ARGV[1] then return redis.error_reply('FENCED ' .. tostring(fence)) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
)

# KEYS: lease, fence. ARGV: token.
RELEASE: Final = Script(
    """
if redis.call('GET', KEYS[2]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)

# The fence of the two scripts below is the store's, or in a Cluster the partition's: `unit` scales
# the token in it.
_CHECK_FENCE: Final = """
local fence, unit = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[2])
if math.floor(fence / unit) > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED ' .. fence)
end
"""

# KEYS: fence, stream, retry, retries. ARGV: token, unit, milliseconds since 1970, limit, group,
# consumer. Makes due retries pending again; returns their sequences.
MOVE_DUE_RETRIES: Final = Script(
    _CHECK_FENCE
    + """
local due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[3], 'LIMIT', 0, ARGV[4])
for _, seq in ipairs(due) do
  redis.call('ZREM', KEYS[3], seq)
  redis.call('HDEL', KEYS[4], seq)
  redis.pcall('XCLAIM', KEYS[2], ARGV[5], ARGV[6], 0, seq .. '-1', 'FORCE', 'JUSTID')
end
return due
"""
)

# KEYS: fence, stream. ARGV: token, unit, group, consumer, idle milliseconds, start, limit. Returns
# the reply of XAUTOCLAIM; an empty one if the group was removed.
CLAIM_IDLE: Final = Script(
    _CHECK_FENCE
    + """
local found = redis.pcall('XAUTOCLAIM', KEYS[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6],
                          'COUNT', ARGV[7], 'JUSTID')
if found.err then return {'0-0', {}} end
return found
"""
)

# KEYS: losses. ARGV: id of this loss, first and last lost frame, milliseconds since 1970, queues as
# JSON.
RECORD_LOSS: Final = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'id', 'first', 'last', 'queues')
if known[1] == ARGV[1] then return 0 end
local first, last, queues = tonumber(ARGV[2]), tonumber(ARGV[3]), cjson.decode(ARGV[5])
redis.call('HINCRBY', KEYS[1], 'total', last - first + 1)
redis.call('HINCRBY', KEYS[1], 'times', 1)
if known[3] then
  first, last = math.min(first, tonumber(known[2])), math.max(last, tonumber(known[3]))
  for name, count in pairs(cjson.decode(known[4])) do
    queues[name] = (queues[name] or 0) + count
  end
end
local encoded = next(queues) and cjson.encode(queues) or '{}'
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'first', first, 'last', last, 'at', ARGV[4],
           'queues', encoded)
return 1
"""
)

# KEYS: losses. ARGV: the last lost frame that the operator knows of.
CONFIRM_LOSS: Final = Script(
    """
if redis.call('HGET', KEYS[1], 'last') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'first', 'last', 'times', 'at', 'queues')
return 1
"""
)

ALL_SCRIPTS: Final = (
    WRITE,
    WRITE_PARTITION,
    MOVE_DUE_RETRIES,
    CLAIM_IDLE,
    ACQUIRE,
    FORCE_ACQUIRE,
    RENEW,
    RELEASE,
    RECORD_LOSS,
    CONFIRM_LOSS,
)

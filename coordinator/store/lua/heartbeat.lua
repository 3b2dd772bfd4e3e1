-- ARGV: worker id, incarnation, alive_ms, queue_tokens, free_tokens, is busy, is idle, fields, values. 0: not current.
local id = ARGV[1]
local node = key('node:', id)
local known = redis.call('HMGET', node, 'incarnation', 'term', 'pending', 'reserved', 'capacity', 'idle_pending')
if known[1] ~= ARGV[2] or known[2] == '0' then return 0 end
-- What the worker holds beyond our credits: placed before Redis lost them, or grown longer than its credit.
local used_tokens = ARGV[6] == '1' and known[5] - ARGV[5] or 0
local beyond_pending = math.max(0, ARGV[4] - known[3])
local beyond_reserved = math.max(0, used_tokens - known[4])
-- Credits that an idle worker had at its last beat, too, are of prompts that it never got: they do not fill it.
local idle_pending = ARGV[7] == '1' and tonumber(ARGV[5]) >= tonumber(known[5]) and known[3] or ''
if idle_pending ~= '' and known[6] and known[6] ~= '' then
  beyond_pending = -math.min(tonumber(known[6]), tonumber(idle_pending))
end
redis.call('HSET', node, 'beyond_pending', beyond_pending, 'beyond_reserved', beyond_reserved,
  'idle_pending', idle_pending, 'until', NOW_MS + ARGV[3], unpack(ARGV, 8))
redis.call('ZADD', key('nodes'), 0, id)
touch(id)
return 1
